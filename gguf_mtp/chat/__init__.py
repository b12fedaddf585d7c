"""Chats as models write and read them: templates, reasoning, tool calls. Knows no model."""
