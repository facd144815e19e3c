"""The ranks of a job: how they start, what each computes on, who watches them, how they end."""
