"""kv_transfer.handoff"""
