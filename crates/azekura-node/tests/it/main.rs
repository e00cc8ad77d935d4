//! Nodes as processes on loopback.

mod clocks;
mod cluster;
mod faults;
mod histories;
mod namespaces;
mod registers;
mod requests;
mod walkthrough;
