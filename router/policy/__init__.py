"""router.policy"""
