//! Pool files: creation, images, close and reopen, comparators.
