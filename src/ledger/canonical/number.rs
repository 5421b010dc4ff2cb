//! Numbers by their decimal value. A literal is accepted when the shortest spelling of the double nearest to it has the
//! same decimal value; that spelling is then the canonical one (ECMAScript's `Number::toString`). Shortest spellings have
//! at most 17 digits, so a literal of any length is settled after one look at it, without big numbers.

use super::{Reason, pointer};

/// The most digits that the shortest spelling of a double can have.
const MOST_DIGITS: usize = 17;
/// Every decimal of so few digits comes back from a double, as long as it is well within the range of doubles.
const SAFE_DIGITS: usize = 15;
const SAFE_RANGE: std::ops::RangeInclusive<i64> = -300..=300;
/// How much of a refused literal is said back, in bytes.
const LONGEST_ECHO: usize = 40;
/// Up to here the standard library's reading of a literal is certain to be right: it reads exponents only so far.
const LONGEST_READ: usize = 1000;

/// `0.d₁d₂d₃… × 10^point`, without zeros at either end; zero has no digits and no sign.
#[derive(Debug, Eq, PartialEq)]
struct Decimal {
    negative: bool,
    digits: [u8; MOST_DIGITS],
    count: usize,
    point: i64,
}

/// `literal` follows JSON's grammar.
pub(super) fn check(literal: &str) -> Result<(), Reason> {
    if is_short_integer(literal) || Decimal::of(literal).is_some_and(|decimal| decimal.is_exact()) {
        return Ok(());
    }
    Err(Reason::InexactNumber {
        literal: pointer::cut(literal, LONGEST_ECHO),
        reads: reads(literal),
    })
}

/// `literal` has passed [`check`].
pub(super) fn write_canonical(literal: &str, out: &mut Vec<u8>) {
    if is_short_integer(literal) && literal != "-0" {
        return out.extend_from_slice(literal.as_bytes());
    }
    // A literal with more digits has not passed.
    if let Some(decimal) = Decimal::of(literal) {
        decimal.write(out);
    }
}

/// `literal` has passed [`check`].
pub(super) fn to_json(literal: &str) -> serde_json::Value {
    let mut canonical = Vec::with_capacity(24);
    write_canonical(literal, &mut canonical);
    let canonical = String::from_utf8_lossy(&canonical);
    if let Ok(integer) = canonical.parse::<i64>() {
        return integer.into();
    }
    if let Ok(integer) = canonical.parse::<u64>() {
        return integer.into();
    }
    // Finite, as it has passed.
    canonical.parse::<f64>().unwrap_or_default().into()
}

/// Most numbers. They are exact, and but for `-0` they are their own canonical spelling.
fn is_short_integer(literal: &str) -> bool {
    literal.len() <= SAFE_DIGITS && literal.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
}

/// What a double makes of a literal that it does not give back.
fn reads(literal: &str) -> Option<String> {
    if literal.len() > LONGEST_READ {
        return None;
    }
    let double: f64 = literal.parse().ok()?;
    if double.is_infinite() {
        return Some("infinity".to_owned());
    }
    let mut out = Vec::new();
    Decimal::nearest(double)?.write(&mut out);
    String::from_utf8(out).ok()
}

impl Decimal {
    /// `None` if there are more digits than any double has.
    fn of(literal: &str) -> Option<Self> {
        let (negative, literal) = literal.strip_prefix('-').map_or((false, literal), |rest| (true, rest));
        let (mantissa, exponent) = literal.split_once(['e', 'E']).unwrap_or((literal, "0"));
        let mut decimal = Self {
            negative,
            digits: [b'0'; MOST_DIGITS],
            count: 0,
            point: 0,
        };
        // Zeros wait until a digit follows: at the end they say nothing.
        let mut zeros = 0;
        let mut in_fraction = false;
        for byte in mantissa.bytes() {
            match byte {
                b'.' => in_fraction = true,
                b'0' if decimal.count == 0 => decimal.point -= i64::from(in_fraction),
                digit => {
                    decimal.point += i64::from(!in_fraction);
                    if digit == b'0' {
                        zeros += 1;
                        continue;
                    }
                    let place = decimal.count + zeros;
                    *decimal.digits.get_mut(place)? = digit;
                    decimal.count = place + 1;
                    zeros = 0;
                }
            }
        }
        if decimal.count == 0 {
            return Some(Self {
                negative: false,
                point: 0,
                ..decimal
            });
        }
        decimal.point = decimal.point.saturating_add(exponent_of(exponent));
        Some(decimal)
    }

    /// The shortest decimal that reads as `double`, of these the nearest to it, and of two as near the even one. The
    /// standard library takes the odd one at times (1424953923781206.3), so the algorithm is not its own.
    fn nearest(double: f64) -> Option<Self> {
        Self::of(ryu_js::Buffer::new().format_finite(double))
    }

    fn is_exact(&self) -> bool {
        if self.count == 0 || self.count <= SAFE_DIGITS && SAFE_RANGE.contains(&self.point) {
            return true;
        }
        self.double().and_then(Self::nearest).as_ref() == Some(self)
    }

    fn double(&self) -> Option<f64> {
        let sign = if self.negative { "-" } else { "" };
        let digits = std::str::from_utf8(self.digits()).ok()?;
        let double: f64 = format!("{sign}0.{digits}e{}", self.point).parse().ok()?;
        double.is_finite().then_some(double)
    }

    fn digits(&self) -> &[u8] {
        &self.digits[..self.count]
    }

    /// ECMAScript's `Number::toString`, whose k is our `count`, n our `point`.
    fn write(&self, out: &mut Vec<u8>) {
        if self.negative {
            out.push(b'-');
        }
        let digits = self.digits();
        let whole = usize::try_from(self.point).unwrap_or(0);
        match self.point {
            _ if digits.is_empty() => out.push(b'0'),
            1..=21 if digits.len() <= whole => {
                out.extend_from_slice(digits);
                out.extend(std::iter::repeat_n(b'0', whole - digits.len()));
            }
            1..=21 => {
                out.extend_from_slice(&digits[..whole]);
                out.push(b'.');
                out.extend_from_slice(&digits[whole..]);
            }
            -5..=0 => {
                out.extend_from_slice(b"0.");
                out.extend((self.point..0).map(|_| b'0'));
                out.extend_from_slice(digits);
            }
            _ => self.write_with_exponent(out),
        }
    }

    fn write_with_exponent(&self, out: &mut Vec<u8>) {
        let (first, rest) = self.digits().split_at(1);
        out.extend_from_slice(first);
        if !rest.is_empty() {
            out.push(b'.');
            out.extend_from_slice(rest);
        }
        out.extend_from_slice(format!("e{:+}", self.point - 1).as_bytes());
    }
}

/// Saturates: no literal is long enough for its digits to bring such an exponent back into range.
fn exponent_of(text: &str) -> i64 {
    let (negative, digits) = match text.as_bytes() {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] | digits => (false, digits),
    };
    let magnitude = digits.iter().fold(0_i64, |sum, digit| {
        sum.saturating_mul(10).saturating_add(i64::from(digit - b'0'))
    });
    if negative { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(literal: &str) -> Option<String> {
        check(literal).ok()?;
        let mut out = Vec::new();
        write_canonical(literal, &mut out);
        Some(String::from_utf8(out).unwrap())
    }

    #[test]
    fn numbers_that_a_double_gives_back_pass() {
        for (literal, expected) in [
            ("0", "0"),
            ("-0", "0"),
            ("-0.0e5", "0"),
            ("0e99999999999", "0"),
            ("0.000e-99999999999999999999999999", "0"),
            ("0.1", "0.1"),
            ("0.1000", "0.1"),
            ("1.10", "1.1"),
            ("1e2", "100"),
            ("1E+2", "100"),
            ("1e0000000000000000000000002", "100"),
            ("10e-1", "1"),
            ("-1.0", "-1"),
            ("9007199254740991", "9007199254740991"),
            ("9007199254740992", "9007199254740992"),
            ("9007199254740994", "9007199254740994"),
            ("12233344445555568", "12233344445555568"),
            ("9223372036854776000", "9223372036854776000"),
            ("100000000000000000000", "100000000000000000000"),
            ("999999999999999900000", "999999999999999900000"),
            ("1000000000000000000000", "1e+21"),
            ("123456789012345e10", "1.23456789012345e+24"),
            ("0.000001", "0.000001"),
            ("0.00000123", "0.00000123"),
            ("0.0000001", "1e-7"),
            ("123.456", "123.456"),
            ("5e-324", "5e-324"),
            ("1.7976931348623157e308", "1.7976931348623157e+308"),
            ("2.2250738585072014e-308", "2.2250738585072014e-308"),
        ] {
            assert_eq!(canonical(literal).as_deref(), Some(expected), "{literal}");
        }
    }

    #[test]
    fn numbers_that_a_double_changes_are_refused() {
        for literal in [
            "9007199254740993",
            "-9007199254740993",
            "12233344445555567",
            // A double holds it exactly, but its shortest spelling is 9223372036854776000.
            "9223372036854775808",
            "9223372036854775807",
            "18446744073709551615",
            "0.1000000000000000055",
            "0.30000000000000004441",
            "333333333.33333329",
            // 1424953923781206.25 is just between .2, which is even and so the spelling, and .3.
            "1424953923781206.25",
            "1424953923781206.3",
            "1e999",
            "-1e999",
            "1e-999",
            "1e309",
            // What lies just past the largest double would be written so.
            "1.797693134862316e308",
            "1.7976931348623159e308",
            "4.9e-324",
            "2e-324",
            "1e99999999999999999999999999999",
            "1e-99999999999999999999999999999",
        ] {
            assert_eq!(canonical(literal), None, "{literal}");
        }
    }

    #[test]
    fn a_refusal_says_what_a_double_reads_and_not_too_much() {
        let refused = |literal: &str| check(literal).unwrap_err().to_string();
        assert!(refused("0.1000000000000000055").contains("reads it as 0.1;"));
        assert!(refused("1e999").contains("reads it as infinity;"));
        assert!(refused("-1e-999").contains("reads it as 0;"));
        let long = "1".repeat(10_000_000);
        assert!(refused(&long).contains("reads it as another number;"));
        assert!(refused(&long).len() < 200);
    }

    #[test]
    fn long_literals_are_settled_by_value_and_at_once() {
        let zeros = "0".repeat(5_000_000);
        assert_eq!(canonical(&format!("15{zeros}e-5000000")).as_deref(), Some("15"));
        assert_eq!(canonical(&format!("0.{zeros}15e5000001")).as_deref(), Some("1.5"));
        assert_eq!(canonical(&format!("1.{zeros}")).as_deref(), Some("1"));
        assert_eq!(canonical(&format!("1.{zeros}1")), None);
        assert_eq!(canonical(&format!("1e{zeros}1")).as_deref(), Some("10"));
        assert_eq!(canonical(&format!("1e1{zeros}")), None);
    }

    /// RFC 8785, appendix B.
    #[test]
    fn the_rfcs_doubles_are_spelled_as_it_says() {
        for (bits, expected) in [
            (0x0000_0000_0000_0000, "0"),
            (0x8000_0000_0000_0000, "0"),
            (0x0000_0000_0000_0001, "5e-324"),
            (0x8000_0000_0000_0001, "-5e-324"),
            (0x7fef_ffff_ffff_ffff, "1.7976931348623157e+308"),
            (0xffef_ffff_ffff_ffff, "-1.7976931348623157e+308"),
            (0x4340_0000_0000_0000, "9007199254740992"),
            (0xc340_0000_0000_0000, "-9007199254740992"),
            (0x4430_0000_0000_0000, "295147905179352830000"),
            (0x44b5_2d02_c7e1_4af5, "9.999999999999997e+22"),
            (0x44b5_2d02_c7e1_4af6, "1e+23"),
            (0x44b5_2d02_c7e1_4af7, "1.0000000000000001e+23"),
            (0x444b_1ae4_d6e2_ef4e, "999999999999999700000"),
            (0x444b_1ae4_d6e2_ef4f, "999999999999999900000"),
            (0x444b_1ae4_d6e2_ef50, "1e+21"),
            (0x3eb0_c6f7_a0b5_ed8c, "9.999999999999997e-7"),
            (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
            (0x41b3_de43_5555_5553, "333333333.3333332"),
            (0x41b3_de43_5555_5554, "333333333.33333325"),
            (0x41b3_de43_5555_5555, "333333333.3333333"),
            (0x41b3_de43_5555_5556, "333333333.3333334"),
            (0x41b3_de43_5555_5557, "333333333.33333343"),
            (0xbecb_f647_612f_3696, "-0.0000033333333333333333"),
            (0x4314_3ff3_c1cb_0959, "1424953923781206.2"),
        ] {
            let double = f64::from_bits(bits);
            let nearest = Decimal::nearest(double).unwrap();
            let mut written = Vec::new();
            nearest.write(&mut written);
            assert_eq!(String::from_utf8(written).unwrap(), expected);
            assert_eq!(canonical(expected).as_deref(), Some(expected));
            assert_eq!(expected.parse::<f64>().unwrap(), double);
        }
    }
}
