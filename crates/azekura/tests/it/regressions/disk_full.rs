//! Full disks and exhausted file descriptors.
