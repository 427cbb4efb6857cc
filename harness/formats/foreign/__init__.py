"""Packed data in the layout of other tools: import of what they wrote, and files that they read themselves."""
