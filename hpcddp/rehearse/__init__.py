"""``hpcddp rehearse``: a small copy of a job meets one fault after another, and is compared with an undisturbed run."""
