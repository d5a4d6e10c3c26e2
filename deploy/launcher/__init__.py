"""`dovetail up`: a whole cluster on one machine, its processes started, watched and stopped."""
