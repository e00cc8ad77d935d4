//! What a long call reports to its caller.

use crate::error::{BackupError, Result};

/// What a call is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Reads files of the checkpoint that are not stored yet.
    Reading,
    /// Uploads objects.
    Uploading,
    /// Downloads objects.
    Downloading,
    /// Applies the shipped log.
    Applying,
}

/// How far a call is. The callback returns whether the call goes on; otherwise it ends with `Interrupted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// What the call is doing.
    pub stage: Stage,
    /// Bytes that are done, in this stage.
    pub done: u64,
    /// Bytes to do, in this stage.
    pub total: u64,
    /// The file or object.
    pub object: &'a str,
}

/// Counts the bytes of one stage.
pub(crate) struct StageProgress<'a> {
    stage: Stage,
    done: u64,
    total: u64,
    report: &'a mut dyn FnMut(&Progress<'_>) -> bool,
}

impl<'a> StageProgress<'a> {
    pub(crate) fn new(stage: Stage, total: u64, report: &'a mut dyn FnMut(&Progress<'_>) -> bool) -> StageProgress<'a> {
        StageProgress { stage, done: 0, total, report }
    }

    /// # Errors
    /// `Interrupted`.
    pub(crate) fn add(&mut self, bytes: u64, object: &str) -> Result<()> {
        self.done += bytes;
        let progress = Progress { stage: self.stage, done: self.done.min(self.total), total: self.total, object };
        if (self.report)(&progress) { Ok(()) } else { Err(BackupError::Interrupted) }
    }

    /// Takes bytes off that have to be transferred again.
    pub(crate) fn take_off(&mut self, bytes: u64) {
        self.done = self.done.saturating_sub(bytes);
    }
}
