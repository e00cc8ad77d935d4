//! Nodes as processes on loopback.

mod cluster;
mod faults;
mod histories;
mod namespaces;
mod registers;
mod requests;
mod walkthrough;
