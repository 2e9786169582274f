"""The batch contract: who gets which samples at which learning rate. No torch."""
