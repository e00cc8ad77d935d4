//! Numbers as people read them. What is missing, or is no number, is a dash.

/// Stands where there is no figure.
pub(crate) const NONE: &str = "–";

/// Three significant digits with a unit of thousands: `942`, `1.23 k`, `12.3 M`, `0.0042`.
pub(crate) fn short(number: f64) -> String {
    let size = number.abs();
    let (scaled, unit) = match size {
        _ if !number.is_finite() => return NONE.into(),
        _ if size >= 999.5e6 => (number / 1e9, " G"),
        _ if size >= 999.5e3 => (number / 1e6, " M"),
        _ if size >= 999.5 => (number / 1e3, " k"),
        _ => (number, ""),
    };
    format!("{}{unit}", three_digits(scaled))
}

/// Three significant digits, never an exponent: `1.23`, `12.3`, `123`, `0.0123`; 0 is `0`.
pub(crate) fn three_digits(number: f64) -> String {
    let size = number.abs();
    if !number.is_finite() {
        return NONE.into();
    }
    let decimals = match size {
        _ if size >= 99.95 || size == 0.0 => 0,
        _ if size >= 9.995 => 1,
        _ if size >= 0.9995 => 2,
        _ => (2 - size.log10().floor() as i32).clamp(3, 6) as usize,
    };
    let text = format!("{number:.decimals$}");
    if decimals > 2 { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Microseconds in the unit that suits them: `0.42 µs`, `1.20 ms`, `2.00 s`.
pub(crate) fn micros(us: f64) -> String {
    match us {
        _ if !us.is_finite() => NONE.into(),
        _ if us >= 999_500.0 => format!("{} s", three_digits(us / 1e6)),
        _ if us >= 999.5 => format!("{} ms", three_digits(us / 1e3)),
        _ if us >= 0.9995 || us == 0.0 => format!("{} µs", three_digits(us)),
        _ => format!("{} ns", three_digits(us * 1e3)),
    }
}

/// Bytes in powers of 1024: `512 B`, `1.50 MiB`.
pub(crate) fn bytes(bytes: f64) -> String {
    if !bytes.is_finite() {
        return NONE.into();
    }
    let mut scaled = bytes;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if scaled < 1023.5 {
            return format!("{} {unit}", three_digits(scaled));
        }
        scaled /= 1024.0;
    }
    format!("{} TiB", three_digits(scaled))
}

/// A ratio with its unit of comparison: `1.42×`.
pub(crate) fn times(ratio: f64) -> String {
    if ratio.is_finite() { format!("{}×", three_digits(ratio)) } else { NONE.into() }
}

/// Seconds as minutes where there are many: `48 s`, `4.2 min`.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        _ if !seconds.is_finite() => NONE.into(),
        _ if seconds >= 99.5 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{seconds:.0} s"),
    }
}

/// A figure that may be missing.
pub(crate) fn or_none(number: Option<f64>, show: impl Fn(f64) -> String) -> String {
    number.map_or_else(|| NONE.into(), show)
}

#[cfg(test)]
mod tests {
    use super::{bytes, micros, or_none, seconds, short, three_digits, times};

    #[test]
    fn numbers_have_three_digits() {
        let cases = [
            (0.0, "0"),
            (0.004_24, "0.00424"),
            (0.5, "0.5"),
            (1.0, "1.00"),
            (9.994, "9.99"),
            (9.996, "10.0"),
            (99.96, "100"),
            (942.4, "942"),
            (999.6, "1.00 k"),
            (12_345.0, "12.3 k"),
            (1_234_567.0, "1.23 M"),
            (2.5e9, "2.50 G"),
            (-1500.0, "-1.50 k"),
            (f64::NAN, "–"),
            (f64::INFINITY, "–"),
        ];
        for (number, text) in cases {
            assert_eq!(short(number), text);
        }
        assert_eq!(three_digits(0.100_000), "0.1");
    }

    #[test]
    fn units_suit_the_size() {
        assert_eq!([0.0, 0.25, 1.5, 1200.0, 3e6].map(micros), ["0 µs", "250 ns", "1.50 µs", "1.20 ms", "3.00 s"]);
        assert_eq!([0.0, 512.0, 1536.0, 3.0 * 1024.0 * 1024.0].map(bytes), ["0 B", "512 B", "1.50 KiB", "3.00 MiB"]);
        assert_eq!(bytes(2f64.powi(42)), "4.00 TiB");
        assert_eq!([48.2, 250.0].map(seconds), ["48 s", "4.2 min"]);
        assert_eq!((times(1.4), times(f64::NAN)), ("1.40×".to_owned(), "–".to_owned()));
        assert_eq!(or_none(None, short), "–");
    }
}
