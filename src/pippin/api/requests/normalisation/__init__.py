"""What changes at every turn of a conversation, kept where it breaks no cached prefix."""
