"""router.text"""
