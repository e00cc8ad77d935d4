//! What is measured, and the machine it is measured on.
//!
//! Invariants: nothing here knows an engine by name; figures of a process come from the kernel, never from the engine.
//!
//! Rooms: [`meter`] operations and their latencies; [`process`] CPU, memory and bytes of this process; [`disk`] bytes
//! below a directory; [`settle`] waits for background work; [`device`] what the device can do; [`harness`] what the
//! harness costs; [`conditions`] the record of all that.

pub(crate) mod conditions;
pub(crate) mod device;
pub(crate) mod disk;
pub(crate) mod harness;
pub(crate) mod meter;
pub(crate) mod process;
pub(crate) mod settle;
