-- Reads token blocks, each with all before it up to one that the reader has.
-- 1  incarnation
-- 2  names of blocks that the reader has, 16 bytes each, in one string
-- 3  names of the blocks to read, likewise
-- Reply    OK, names and values in turn, without those that are not there | RETIRED (also: another attempt, or none)
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state or state.status == 'retired' or arg(1) ~= state.incarnation then return reply('RETIRED', state) end
local seen, blocks = {[NO_BLOCK] = true}, {}
for at = 1, #arg(2), 16 do seen[string.sub(arg(2), at, at + 15)] = true end
for at = 1, #arg(3), 16 do
  local name = string.sub(arg(3), at, at + 15)
  while name and not seen[name] do
    seen[name] = true
    local value = redis.call('HGET', key, 'b:' .. name)
    if value then
      blocks[#blocks + 1] = name
      blocks[#blocks + 1] = value
    end
    name = value and string.sub(value, 1, 16)
  end
end
return reply('OK', state, blocks)
