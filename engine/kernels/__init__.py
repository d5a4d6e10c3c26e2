"""engine.kernels"""
