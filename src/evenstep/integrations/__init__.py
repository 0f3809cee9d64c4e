"""evenstep in the strategies, accelerators and trainers of other frameworks.

Each module is named after its framework, is imported by that name alone, and needs the extra of that name.
"""
