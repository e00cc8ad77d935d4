//! CSV: a first row with the names of the columns, then one row for each entry.

use std::io::{self, Read};
use std::path::Path;

use azekura::Partition;
use csv::{ByteRecord, Position, ReaderBuilder, WriterBuilder};

use crate::args::EncodingArgs;
use crate::command::transfer::loader::EntryLoader;
use crate::command::transfer::report::{ImportError, TransferReport};
use crate::command::transfer::text_fields::{OutputEncodings, input_encoding};
use crate::command::transfer::writer::ExportWriter;
use crate::encoding::TextEncoding;
use crate::error::{CliError, Result};
use crate::progress::ProgressReporter;

/// Writes the header and all entries.
pub(super) fn export(
    partition: &Partition,
    encodings: OutputEncodings,
    out: &mut ExportWriter<'_>,
    progress: &ProgressReporter,
) -> Result<TransferReport> {
    let mut header = Vec::new();
    put_row(&mut header, &encodings.key.field("key"), &encodings.value.field("value"));
    out.put(&header)?;
    encodings.write_rows(partition, out, progress, put_row)
}

fn put_row(out: &mut Vec<u8>, key: &str, value: &str) {
    let mut writer = WriterBuilder::new().buffer_capacity(256).from_writer(out);
    writer.write_record([key, value]).and_then(|()| Ok(writer.flush()?)).expect("writing to memory cannot fail");
}

/// Counts the quotation marks that were read. A complete CSV text has an even number of them.
struct QuoteCounter<R> {
    input: R,
    quotes: u64,
}

impl<R: Read> Read for QuoteCounter<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.quotes += buffer[..n].iter().filter(|byte| **byte == b'"').count() as u64;
        Ok(n)
    }
}

/// A column of the input.
#[derive(Clone, Copy)]
struct Column {
    index: usize,
    encoding: TextEncoding,
}

struct Columns {
    key: Column,
    value: Column,
}

impl Columns {
    /// The columns of a header. The error is a sentence.
    fn of_header(header: &ByteRecord, args: EncodingArgs) -> Result<Columns, String> {
        let (mut key, mut value) = (None, None);
        for (index, field) in header.iter().enumerate() {
            let field = std::str::from_utf8(field).map_err(|_| "the first row is not UTF-8")?;
            let column = |name| TextEncoding::of_field(field, name).map(|encoding| (encoding, name));
            let (encoding, name) = column("key").or_else(|| column("value")).ok_or_else(|| {
                let names = "\"key\" and \"value\", or \"key_hex\" and so on";
                format!("the first row must name the columns {names}; it has {field:?}")
            })?;
            let (slot, given) =
                if name == "key" { (&mut key, args.key_encoding) } else { (&mut value, args.value_encoding) };
            let encoding = input_encoding(encoding, given, name)?;
            if slot.replace(Column { index, encoding }).is_some() {
                return Err(format!("the first row names two columns for the {name}"));
            }
        }
        match (key, value) {
            (Some(key), Some(value)) => Ok(Columns { key, value }),
            (None, _) => Err("the first row names no column \"key\"".into()),
            (_, None) => Err("the first row names no column \"value\"".into()),
        }
    }
}

/// Stores every row. Stores a row only after the next one was read, because a quotation mark that is not closed makes
/// the rest of the input the last field.
pub(super) fn import(
    input: impl Read,
    source: &Path,
    args: EncodingArgs,
    loader: &mut EntryLoader<'_>,
) -> Result<(), ImportError> {
    let input = QuoteCounter { input, quotes: 0 };
    let mut reader = ReaderBuilder::new().has_headers(false).from_reader(input);
    let (mut record, mut next) = (ByteRecord::new(), ByteRecord::new());
    let mut read = |record: &mut ByteRecord, quotes: &mut u64| -> Result<bool, ImportError> {
        let more = reader.read_byte_record(record).map_err(|error| read_error(error, source))?;
        *quotes = reader.get_ref().quotes;
        Ok(more)
    };
    let mut quotes = 0;
    if !read(&mut record, &mut quotes)? {
        return Err(ImportError::input("the input is empty: a first row must name the columns", 0));
    }
    let columns = Columns::of_header(&record, args).map_err(|message| ImportError::input(message, 0))?;
    let mut more = read(&mut record, &mut quotes)?;
    while more {
        let (line, offset) = place(&record);
        more = read(&mut next, &mut quotes)?;
        if !more && !quotes.is_multiple_of(2) {
            let message = format!("line {line}: a quotation mark is not closed, or stands alone in a field");
            return Err(ImportError::input(message, offset));
        }
        let field = |column: Column, name: &str| {
            let text = std::str::from_utf8(&record[column.index]).map_err(|_| "is not UTF-8".into());
            let bytes = text.and_then(|text| column.encoding.decode(text));
            bytes.map_err(|why| ImportError::input(format!("line {line}: the {name} {why}"), offset))
        };
        loader.put(&field(columns.key, "key")?, &field(columns.value, "value")?, || format!("line {line}"))?;
        loader.progress.at_least(offset);
        std::mem::swap(&mut record, &mut next);
    }
    Ok(())
}

fn place(record: &ByteRecord) -> (u64, u64) {
    record.position().map_or((0, 0), |position: &Position| (position.line(), position.byte()))
}

fn read_error(error: csv::Error, source: &Path) -> ImportError {
    let offset = error.position().map_or(0, Position::byte);
    let line = error.position().map_or(0, Position::line);
    match error.into_kind() {
        csv::ErrorKind::Io(error) => CliError::os("read the input", source, error).into(),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            let message = format!("line {line} has {len} columns, the first row has {expected_len}");
            ImportError::input(message, offset)
        }
        _ => ImportError::input(format!("line {line} is not CSV"), offset),
    }
}
