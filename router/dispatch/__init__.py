"""router.dispatch"""
