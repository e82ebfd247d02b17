# Ruby's Zlib.crc32 of each name on standard input.
require "zlib"

$stdin.each_line(chomp: true) do |line|
  _kind, unit, count = line.split(":")
  name = [unit || ""].pack("H*").force_encoding("UTF-8") * (count || 1).to_i
  puts Zlib.crc32(name)
end
