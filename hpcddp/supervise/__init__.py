"""What the batch script runs before, beside and after the tasks: begin, stage, watch, end; budgets, requeue."""
