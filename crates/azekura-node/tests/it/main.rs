//! Nodes as processes on loopback.

mod clocks;
mod cluster;
mod faults;
mod histories;
mod namespaces;
mod nemesis;
mod registers;
mod requests;
mod walkthrough;
