"""engine.sampling"""
