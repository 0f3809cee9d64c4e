"""evenstep in the strategies, accelerators and trainers of other frameworks.

Each module is named after its framework, must be imported by name, and needs the extra of the same name.
"""
