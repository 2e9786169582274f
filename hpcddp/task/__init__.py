"""What runs in every rank before user code: signals, rendezvous, watchdog, failure record."""
