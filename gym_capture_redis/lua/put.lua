-- Stores a record with the token blocks that are new, and settles its intent.
-- 1  incarnation of the attempt that the record belongs to
-- 2  call
-- 3  the call's row: 'r', seal of the record
-- 4  the encoded record
-- 5  how many token ids its prompt and generation have
-- 6  name of the block that the first of the blocks below follows; 16 zero bytes for none
-- 7  names of the parts (stage.lua) that the record needs, 16 bytes each, in one string
-- 8  names of the blocks below, 16 bytes each, in one string
-- 9… the blocks, parents first: name of the field, value
-- Reply    OK | SAME (stored already) | MISSING (the block of 6, or a part, is not stored; nothing changed) |
--          CONFLICT (other content, or refused: the rollout is now incomplete) | FROZEN |
--          RETIRED (also: another attempt, or no rollout)
-- Repeat   safe: SAME
local call, base, parts, names = arg(2), arg(6), arg(7), arg(8)
local row_field = 'c:' .. call
local state, err, known = load_state(row_field, 'b:' .. base)
if err then return err end
if not state or state.incarnation ~= arg(1) or state.status == 'retired' then
  return reply('RETIRED', state)
end
local row = known[1]
local settled = row and row ~= 'n'
if settled and string.sub(row, 1, DIGEST_END) == string.sub(arg(3), 1, DIGEST_END) then
  return reply('SAME', state)
end
if state.status == 'frozen' then return reply('FROZEN', state) end
if settled then
  mark_failure(state, call, 'conflict')
  return reply('CONFLICT', state)
end
if base ~= NO_BLOCK and not known[2] then return reply('MISSING', state) end
for at = 1, #parts, 16 do
  if redis.call('HEXISTS', key, 'b:' .. string.sub(parts, at, at + 15)) == 0 then
    return reply('MISSING', state)
  end
end

local count = #names / 16
local last = count > 0 and string.sub(names, -16) or base
-- The newest three ends of chains: this one in place of the one it goes on from.
if last ~= NO_BLOCK then
  state.ends = string.sub(without_end(without_end(state.ends, base), last) .. last, -48)
end
if row then state.intents = state.intents - 1 end
state.version = state.version + 1
state.records = state.records + 1
state.blocks = state.blocks + count
state.ids = state.ids + arg(5)
state.bytes = state.bytes + #arg(4)
for number = 1, count do state.bytes = state.bytes + #arg(8 + 2 * number) end
local trace = next_step(state)
local last_argument = 8 + 2 * count
local added = write(state, trace, count .. ':' .. names .. 'r:' .. call, row_field, arg(3), 'r:' .. call, arg(4),
  unpack(ARGV, first + 9, first + math.min(last_argument, 8 + MOST_ARGUMENTS)))
for from = 9 + MOST_ARGUMENTS, last_argument, MOST_ARGUMENTS do
  local to = math.min(last_argument, from + MOST_ARGUMENTS - 1)
  added = added + redis.call('HSET', key, unpack(ARGV, first + from, first + to))
end

-- Some of the blocks may have been there already: the first ones, as a block is stored with or after its parents.
local there = math.min(count, count + (row and 2 or 3) - added)
if there > 0 then
  for number = 1, there do state.bytes = state.bytes - #arg(8 + 2 * number) end
  state.blocks = state.blocks - there
  write(state, trace, count - there .. ':' .. string.sub(names, 16 * there + 1) .. 'r:' .. call)
end
return reply('OK', state)
