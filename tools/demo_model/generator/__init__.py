"""Small requests with programs that answer them: the default model's generated training text.

A task is composed of parts (`pipeline`), made from a template (`families`), or one of a list
(`single`). It can say itself in many wordings and write itself in several forms; every program is
run against the task's reference before it is used. `documents` makes training text of it.

All draws come from one `random.Random`, in a fixed order: a seed names its text.
"""
