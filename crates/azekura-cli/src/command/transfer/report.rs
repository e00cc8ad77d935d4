//! Counts of an import or export, and the input errors that end an import.

use std::path::Path;

use serde_json::json;

use crate::display;
use crate::error::{CliError, CommandOutcome, Result, print_error};
use crate::output::{CommandOutput, capped};

/// Number of skipped entries that a report names. The others are counted.
const SKIPPED_NAMED: usize = 1000;

/// Counts of stored or written entries, and the skipped ones with the reasons.
#[derive(Debug, Default)]
pub(crate) struct TransferReport {
    pub(crate) entries: u64,
    pub(crate) bytes: u64,
    /// The first skipped entries.
    pub(crate) skipped: Vec<(String, String)>,
    /// Number of skipped entries that `skipped` lacks.
    pub(crate) more_skipped: u64,
}

impl TransferReport {
    pub(super) fn count(&mut self, key: &[u8], value: &[u8]) {
        self.entries += 1;
        self.bytes += (key.len() + value.len()) as u64;
    }

    pub(super) fn skip(&mut self, name: String, reason: impl Into<String>) {
        match self.skipped.len() < SKIPPED_NAMED {
            true => self.skipped.push((name, reason.into())),
            false => self.more_skipped += 1,
        }
    }

    /// Prints the counts, followed by `done` ("stored", "written"), and the skipped entries.
    pub(super) fn print(&self, done: &str, all_errors: bool, output: &mut CommandOutput) -> Result<CommandOutcome> {
        let skipped: Vec<_> =
            self.skipped.iter().map(|(name, reason)| json!({ "name": name, "reason": reason })).collect();
        output.json_or_text(
            json!({ "entries": self.entries, "bytes": self.bytes, "left_out": skipped,
                "left_out_more": self.more_skipped }),
            format_args!("{}, {} {done}", display::plural(self.entries, "entry"), display::bytes(self.bytes)),
        )?;
        Ok(self.print_skipped(all_errors, output.json()))
    }

    /// Prints the skipped entries on standard error, unless the output is JSON.
    pub(crate) fn print_skipped(&self, all_errors: bool, json: bool) -> CommandOutcome {
        if !json {
            let lines: Vec<_> = self.skipped.iter().map(|(name, reason)| format!("skipped {name}: {reason}")).collect();
            let (shown, hint) = capped(&lines, all_errors);
            let more =
                (self.more_skipped > 0).then(|| format!("skipped {} more that are not named", self.more_skipped));
            shown.iter().chain(&hint).chain(&more).for_each(|line| print_error(format_args!("azekura: {line}")));
        }
        CommandOutcome::success_if(self.skipped.is_empty())
    }
}

/// Reason why an import ends before its end.
#[derive(Debug)]
pub(super) enum ImportError {
    /// The input is damaged, truncated or in another format: a sentence about it, and where.
    Input { message: String, offset: u64 },
    /// Another error, of the database or of the operating system.
    Other(CliError),
}

impl ImportError {
    pub(super) fn input(message: impl Into<String>, offset: u64) -> ImportError {
        ImportError::Input { message: message.into(), offset }
    }

    /// The error of the command. `stored` is the number of entries that were stored before the error.
    pub(super) fn into_cli_error(self, source: &Path, stored: u64) -> CliError {
        let effect = match stored {
            0 => "nothing was stored".into(),
            1 => "1 entry before it was stored".into(),
            _ => format!("{} before it were stored", display::plural(stored, "entry")),
        };
        match self {
            ImportError::Other(error) => error.with_note(&effect),
            ImportError::Input { message, offset } => {
                CliError::input(source, format!("{message}; {effect}")).at_offset(offset)
            }
        }
    }
}

impl From<CliError> for ImportError {
    fn from(error: CliError) -> ImportError {
        ImportError::Other(error)
    }
}
