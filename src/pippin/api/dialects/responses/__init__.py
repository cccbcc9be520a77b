"""OpenAI's Responses API: requests, their items, replies, and a store of responses."""
