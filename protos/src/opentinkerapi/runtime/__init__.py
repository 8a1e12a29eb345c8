"""What the client and every service share at run time: channels, errors, tensors, chat rendering."""
