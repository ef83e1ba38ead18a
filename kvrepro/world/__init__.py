"""The synthetic world of the embedded models.

world, words         tasks and their text; the vocabulary
instructions         system prompts whose rules can be checked
ruler                RULER's tasks at any length
"""
