"""Chats in a terminal, a client of servers, a check of the machine."""
