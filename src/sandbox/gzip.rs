//! The gzip format (RFC 1952) without compression: stored blocks only. Enough to see whether somebody decodes it.

const LARGEST_BLOCK: usize = 0xFFFF;

pub fn stored(bytes: &[u8]) -> Vec<u8> {
    let mut packed = vec![0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF];
    let count = bytes.len().div_ceil(LARGEST_BLOCK).max(1);
    for number in 0..count {
        let block = &bytes[number * LARGEST_BLOCK..bytes.len().min((number + 1) * LARGEST_BLOCK)];
        let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
        packed.push(u8::from(number + 1 == count));
        packed.extend_from_slice(&length.to_le_bytes());
        packed.extend_from_slice(&(!length).to_le_bytes());
        packed.extend_from_slice(block);
    }
    packed.extend_from_slice(&checksum(bytes).to_le_bytes());
    // Modulo 2^32, as the format wants it.
    packed.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    packed
}

/// CRC-32 as of IEEE 802.3, bit by bit.
fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ (0xEDB8_8320 & (sum & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_known_one() {
        assert_eq!(checksum(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn long_texts_take_several_blocks() {
        let packed = stored(&vec![7; LARGEST_BLOCK + 1]);
        assert_eq!(packed.len(), 10 + 5 + LARGEST_BLOCK + 5 + 1 + 8);
        assert_eq!((packed[10], packed[15 + LARGEST_BLOCK]), (0, 1));
    }
}
