"""engine.scheduling"""
