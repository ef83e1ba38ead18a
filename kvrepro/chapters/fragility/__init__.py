"""The chapter on DefensiveKV: is a window that saw little a reason to forget?"""
