"""router.web"""
