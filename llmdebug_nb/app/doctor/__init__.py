"""What differs between two set-ups, before any comparison of tensors."""
