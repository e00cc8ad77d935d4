//! The check of an LMDB database in a process of its own: LMDB has no checksums, and may end the process by a signal if
//! the file is damaged.

use std::env;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::args::ImportArgs;
use crate::command::transfer::report::TransferReport;
use crate::error::{CliError, Result};

/// Runs this program as `import --dry-run`, and returns its counts or its error.
pub(super) fn check(args: &ImportArgs) -> Result<TransferReport> {
    let source = &*args.source;
    let program = env::current_exe().map_err(|e| CliError::os("find this program", source, e))?;
    let mut command = Command::new(&program);
    command.args(["--json", "import", "--from", "lmdb", "--dry-run", "--in-process"]);
    command.args(args.table.iter().map(|table| format!("--table={table}")));
    command.args(args.partition.iter().map(|partition| format!("--partition={partition}")));
    let run = command.arg("--").arg(source).stdin(Stdio::null()).output();
    let output = run.map_err(|e| CliError::os("start this program", &program, e))?;
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    match (output.status.code(), parsed(&output.stdout), parsed(&output.stderr)) {
        (Some(0), Some(report), _) => {
            let number = |field: &str| report[field].as_u64().unwrap_or_default();
            Ok(TransferReport { entries: number("entries"), bytes: number("bytes"), ..TransferReport::default() })
        }
        (Some(code), _, Some(error)) => {
            Err(CliError::of_process(u8::try_from(code).unwrap_or(u8::MAX), &error["error"]))
        }
        _ => {
            let message = format!("LMDB ended the process that read this database ({}): it is damaged", output.status);
            Err(CliError::input(source, message))
        }
    }
}
