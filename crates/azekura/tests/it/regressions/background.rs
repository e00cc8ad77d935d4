//! Workers, budgets, listeners, deletion of partitions.
