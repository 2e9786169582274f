"""What a cluster offers and allows: queries, facts, rules, and the profile that records them."""
