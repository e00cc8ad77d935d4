//! `azekura-bench`: workloads that measure azekura, alone and compared with its peers. The README says what makes them
//! fair.
//!
//! Layers, each of which imports from those after it only: [`commands`] the command line; [`experiment`] questions with
//! variants; [`report`] medians, tables and charts; [`task`] parent and child processes; [`workload`] records and
//! operations; [`engine`] the engines under test; [`measure`] counters and the machine; [`error`].

// A bench measures the machine itself: files, clocks and threads are its subject.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod commands;
mod engine;
mod error;
mod experiment;
mod measure;
mod report;
mod task;
mod workload;

use clap::Parser;

fn main() -> error::Result<()> {
    commands::Cli::parse().perform()
}
