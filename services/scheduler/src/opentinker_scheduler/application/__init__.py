"""What happens on a call and on a tick: rules inside transactions, and the effects that follow."""
