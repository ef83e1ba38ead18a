"""The synthetic world of the embedded models.

world, words         tasks and their text; the vocabulary; tokenizer
instructions         system prompts whose rules can be checked
rows                 conversations for training
ruler                RULER's tasks at any length
"""
