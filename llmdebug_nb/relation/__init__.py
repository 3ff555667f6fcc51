"""Say what mine's tensor is of golden's: negated, rounded, its heads in another order."""
