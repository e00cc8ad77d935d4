//! What an import or an export has done, and how it is told.

use serde_json::json;

use crate::display;
use crate::failure::{Answer, Result, complain};
use crate::output::Output;

/// What was moved, and what was left out and why.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    pub(crate) entries: u64,
    pub(crate) bytes: u64,
    pub(crate) left_out: Vec<(String, String)>,
}

impl Moved {
    /// Yes if nothing was left out.
    pub(crate) fn tell(&self, verb: &str, output: &mut Output) -> Result<Answer> {
        if output.json() {
            let left_out: Vec<_> =
                self.left_out.iter().map(|(name, why)| json!({ "name": name, "reason": why })).collect();
            output.line(json!({ "entries": self.entries, "bytes": self.bytes, "left_out": left_out }))?;
        } else {
            output.line(format!(
                "{}, {} {verb}",
                display::plural(self.entries, "entry"),
                display::bytes(self.bytes)
            ))?;
            for (name, why) in &self.left_out {
                complain(format_args!("azekura: left out {name}: {why}"));
            }
        }
        Ok(Answer::yes_if(self.left_out.is_empty()))
    }
}
