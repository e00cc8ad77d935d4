//! Measuring a process and its machine.
//!
//! No module here depends on an engine. Figures of a process come from the kernel, never from the engine.
//!
//! [`meter`] counts operations and records latencies; [`process`] reads CPU, memory and I/O counters and repeats work
//! for a time; [`disk`] sizes, copies and evicts files; [`device`] measures the device and lists the conditions.

pub(crate) mod device;
pub(crate) mod disk;
pub(crate) mod meter;
pub(crate) mod process;
