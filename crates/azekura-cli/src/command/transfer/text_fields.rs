//! Encodings of the fields "key" and "value" in CSV and JSON lines.

use azekura::Partition;

use crate::args::EncodingArgs;
use crate::command::transfer::report::TransferReport;
use crate::command::transfer::writer::ExportWriter;
use crate::encoding::{self, TextEncoding};
use crate::error::{CliError, Result};
use crate::interrupt;
use crate::progress::ProgressReporter;

/// The encoding of all keys and of all values of one output.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutputEncodings {
    pub(super) key: TextEncoding,
    pub(super) value: TextEncoding,
}

impl OutputEncodings {
    /// The given encodings; UTF-8 or hexadecimal where none is given. Then it reads the entries to see which.
    pub(super) fn choose(args: EncodingArgs, partition: &Partition, progress: &ProgressReporter) -> Result<Self> {
        let (mut keys_are_text, mut values_are_text) = (true, true);
        if args.value_encoding.is_none() {
            for entry in partition.iter() {
                let (key, value) = entry?;
                interrupt::check()?;
                progress.add(1);
                keys_are_text &= std::str::from_utf8(&key).is_ok();
                values_are_text &= std::str::from_utf8(&value).is_ok();
                if !values_are_text && (!keys_are_text || args.key_encoding.is_some()) {
                    break;
                }
            }
        } else if args.key_encoding.is_none() {
            for key in partition.keys() {
                interrupt::check()?;
                keys_are_text &= std::str::from_utf8(&key?).is_ok();
                progress.add(1);
            }
        }
        Ok(OutputEncodings {
            key: args.key_encoding.unwrap_or(TextEncoding::for_text(keys_are_text)),
            value: args.value_encoding.unwrap_or(TextEncoding::for_text(values_are_text)),
        })
    }

    /// Writes every entry of `partition` with `row`, which appends the text of a key and a value.
    pub(super) fn write_rows(
        self,
        partition: &Partition,
        out: &mut ExportWriter<'_>,
        progress: &ProgressReporter,
        row: impl Fn(&mut Vec<u8>, &str, &str),
    ) -> Result<TransferReport> {
        let mut report = TransferReport::default();
        let mut bytes = Vec::new();
        for entry in partition.iter() {
            let (key, value) = entry?;
            let not_text = |name| {
                let key = encoding::escaped(&key);
                CliError::usage(format!("the {name} of {key} is not UTF-8; choose another --{name}-encoding"))
            };
            let key_text = self.key.encode(&key).ok_or_else(|| not_text("key"))?;
            let value_text = self.value.encode(&value).ok_or_else(|| not_text("value"))?;
            bytes.clear();
            row(&mut bytes, &key_text, &value_text);
            out.put(&bytes)?;
            report.count(&key, &value);
            progress.add(1);
        }
        Ok(report)
    }
}

/// The encoding of an input field: the one that its name states, or the `given` one for a plain "key" or "value". The
/// error is a sentence.
pub(super) fn input_encoding(
    stated: TextEncoding,
    given: Option<TextEncoding>,
    name: &str,
) -> Result<TextEncoding, String> {
    match given {
        None => Ok(stated),
        Some(given) if stated == TextEncoding::Utf8 || stated == given => Ok(given),
        Some(_) => Err(format!("\"{}\" states its encoding, and --{name}-encoding another", stated.field(name))),
    }
}
