//! CSV: a first row with the names of the columns, then one row for each entry.

use std::io::{self, Read};
use std::path::Path;

use azekura::Partition;
use csv::{ByteRecord, Position, ReaderBuilder, WriterBuilder};

use crate::args::{CsvArgs, EncodingArgs};
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
    csv: &CsvArgs,
    out: &mut ExportWriter<'_>,
    progress: &ProgressReporter,
) -> Result<TransferReport> {
    let mut header = Vec::new();
    let delimiter = csv.delimiter.unwrap_or(b',');
    let (key, value) = column_names(csv);
    put_row(&mut header, delimiter, &encodings.key.field(key), &encodings.value.field(value));
    out.put(&header)?;
    encodings.write_rows(partition, out, progress, |out, key, value| put_row(out, delimiter, key, value))
}

/// The names of the columns for keys and values, without the suffixes of their encodings.
fn column_names(csv: &CsvArgs) -> (&str, &str) {
    (csv.key_column.as_deref().unwrap_or("key"), csv.value_column.as_deref().unwrap_or("value"))
}

fn put_row(out: &mut Vec<u8>, delimiter: u8, key: &str, value: &str) {
    let mut writer = WriterBuilder::new().delimiter(delimiter).buffer_capacity(256).from_writer(out);
    writer.write_record([key, value]).and_then(|()| Ok(writer.flush()?)).expect("writing to memory cannot fail");
}

/// Fails at a quotation mark that is not part of valid CSV. The parser would take other contents for such a field, or
/// join rows.
struct QuoteChecker<R> {
    input: R,
    delimiter: u8,
    state: QuoteState,
    line: u64,
    offset: u64,
    /// The line and the offset of the quotation mark that opened the last quoted field.
    opened: (u64, u64),
}

/// The place in a field of the next byte.
#[derive(Clone, Copy)]
enum QuoteState {
    Start,
    Unquoted,
    Quoted,
    /// Behind a quotation mark in a quoted field. It ends the field, or is the first of two that stand for one.
    Ending,
}

/// A quotation mark that is not valid.
#[derive(Debug)]
struct QuoteError {
    message: String,
    offset: u64,
}

impl std::fmt::Display for QuoteError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for QuoteError {}

impl<R> QuoteChecker<R> {
    fn new(input: R, delimiter: u8) -> QuoteChecker<R> {
        QuoteChecker { input, delimiter, state: QuoteState::Start, line: 1, offset: 0, opened: (1, 0) }
    }

    fn check(&mut self, byte: u8) -> Result<(), QuoteError> {
        let is_end = matches!(byte, b'\r' | b'\n') || byte == self.delimiter;
        let is_byte_order_mark = b"\xef\xbb\xbf".get(self.offset as usize) == Some(&byte);
        self.state = match (self.state, byte) {
            (QuoteState::Start, _) if is_byte_order_mark => QuoteState::Start,
            (QuoteState::Start, b'"') => {
                self.opened = (self.line, self.offset);
                QuoteState::Quoted
            }
            (QuoteState::Start | QuoteState::Unquoted | QuoteState::Ending, _) if is_end => QuoteState::Start,
            (QuoteState::Unquoted, b'"') => {
                return Err(self.error("a quotation mark in a field that does not begin with one"));
            }
            (QuoteState::Start | QuoteState::Unquoted, _) => QuoteState::Unquoted,
            (QuoteState::Quoted, b'"') => QuoteState::Ending,
            (QuoteState::Quoted, _) | (QuoteState::Ending, b'"') => QuoteState::Quoted,
            (QuoteState::Ending, _) => return Err(self.error("text behind a closing quotation mark")),
        };
        self.line += u64::from(byte == b'\n');
        self.offset += 1;
        Ok(())
    }

    fn error(&self, what: &str) -> QuoteError {
        QuoteError { message: format!("line {}: {what}", self.line), offset: self.offset }
    }
}

impl<R: Read> Read for QuoteChecker<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        let checked = match (n, self.state) {
            (0, QuoteState::Quoted) if !buffer.is_empty() => {
                let (line, offset) = self.opened;
                Err(QuoteError { message: format!("line {line}: a quotation mark is not closed"), offset })
            }
            _ => buffer[..n].iter().try_for_each(|byte| self.check(*byte)),
        };
        checked.map(|()| n).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
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
    fn of_header(header: &ByteRecord, args: EncodingArgs, csv: &CsvArgs) -> Result<Columns, String> {
        let (key_name, value_name) = column_names(csv);
        let ignores_others = csv.key_column.is_some() || csv.value_column.is_some();
        let (mut key, mut value) = (None, None);
        let fields: Vec<&str> = header
            .iter()
            .map(std::str::from_utf8)
            .collect::<Result<_, _>>()
            .map_err(|_| "the first row is not UTF-8")?;
        // A column with exactly the given name is preferred to one with the suffix of an encoding.
        let column = |field: &str, name: &str| {
            let is_other = ignores_others && field != name && fields.contains(&name);
            TextEncoding::of_field(field, name).filter(|_| !is_other)
        };
        for (index, field) in fields.iter().enumerate() {
            let (slot, given, name, encoding) = match (column(field, key_name), column(field, value_name)) {
                (Some(encoding), _) => (&mut key, args.key_encoding, "key", encoding),
                (None, Some(encoding)) => (&mut value, args.value_encoding, "value", encoding),
                (None, None) if ignores_others => continue,
                (None, None) => {
                    let names = "\"key\" and \"value\", or \"key_hex\" and so on";
                    return Err(format!("the first row must name the columns {names}; it has {field:?}"));
                }
            };
            let encoding = input_encoding(encoding, given, name)?;
            if slot.replace(Column { index, encoding }).is_some() {
                return Err(format!("the first row names two columns for the {name}"));
            }
        }
        match (key, value) {
            (Some(key), Some(value)) => Ok(Columns { key, value }),
            (None, _) => Err(format!("the first row names no column {key_name:?}")),
            (_, None) => Err(format!("the first row names no column {value_name:?}")),
        }
    }
}

/// Stores every row.
pub(super) fn import(
    input: impl Read,
    source: &Path,
    args: EncodingArgs,
    csv: &CsvArgs,
    loader: &mut EntryLoader<'_>,
) -> Result<(), ImportError> {
    let delimiter = csv.delimiter.unwrap_or(b',');
    let input = QuoteChecker::new(input, delimiter);
    let mut reader = ReaderBuilder::new().delimiter(delimiter).has_headers(false).from_reader(input);
    let mut record = ByteRecord::new();
    let mut read = |record: &mut ByteRecord| reader.read_byte_record(record).map_err(|error| read_error(error, source));
    if !read(&mut record)? {
        return Err(ImportError::input("the input is empty: a first row must name the columns", 0));
    }
    let columns = Columns::of_header(&record, args, csv).map_err(|message| ImportError::input(message, 0))?;
    while read(&mut record)? {
        let (line, offset) = place(&record);
        let field = |column: Column, name: &str| {
            let text = std::str::from_utf8(&record[column.index]).map_err(|_| "is not UTF-8".into());
            let bytes = text.and_then(|text| column.encoding.decode(text));
            bytes.map_err(|why| ImportError::input(format!("line {line}: the {name} {why}"), offset))
        };
        loader.put(&field(columns.key, "key")?, &field(columns.value, "value")?, || format!("line {line}"))?;
        loader.progress.at_least(offset);
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
        csv::ErrorKind::Io(error) => match error.downcast::<QuoteError>() {
            Ok(quotes) => ImportError::input(quotes.message, quotes.offset),
            Err(error) => CliError::os("read the input", source, error).into(),
        },
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            let message = format!("line {line} has {len} columns, the first row has {expected_len}");
            ImportError::input(message, offset)
        }
        _ => ImportError::input(format!("line {line} is not CSV"), offset),
    }
}
