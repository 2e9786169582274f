"""The batch script before and after the tasks: begin, end, budgets, requeue."""
