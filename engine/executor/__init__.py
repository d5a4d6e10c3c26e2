"""engine.executor"""
