"""router.api"""
