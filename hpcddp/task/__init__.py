"""What runs in every rank before and beside user code: signals, rendezvous, watchdog, failure record."""
