"""Plug-ins for other tools, one module each; a module imports its tool when it is imported itself.

See ``docs/integrations.md`` for what works with which tool.
"""
